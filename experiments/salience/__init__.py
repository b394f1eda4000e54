"""Which importance metric keeps most accuracy when two pretrained models are cut to half."""
