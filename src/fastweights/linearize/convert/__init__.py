"""Conversion of a pretrained softmax model's attention layers to linear attention."""
