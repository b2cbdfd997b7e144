"""A pretrained softmax model whose attention layers are made linear."""
