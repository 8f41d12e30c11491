"""Which sequences go into which rank's microbatches? Packing and balancing, without torch or processes."""
