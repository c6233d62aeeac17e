"""Own kernels and operators: tensors come in, tensors go out."""
