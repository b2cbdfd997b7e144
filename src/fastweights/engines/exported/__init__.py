"""Our language models as programs without Python: graphs of torch.export, and ONNX made of them."""
