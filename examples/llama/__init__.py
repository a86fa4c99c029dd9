"""A small Llama-style model, text to train it on, and a training loop: what the examples share."""
