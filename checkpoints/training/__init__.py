"""How the embedded tiny Flint was made: corpus, tokenizer, training, export, evaluation. Nothing is downloaded."""
