"""Operations of layers: the short causal convolution and RMSNorm."""
