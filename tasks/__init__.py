"""Fine-tuning of BERT: one module per task type; commands finetune, evaluate, predict, extract."""
