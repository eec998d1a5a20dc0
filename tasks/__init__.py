"""What to fine-tune BERT for: a module a kind of task, and the commands finetune, evaluate,
predict."""
