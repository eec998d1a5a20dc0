"""What to fine-tune BERT for: a module a kind of task; finetune, evaluate, predict."""
