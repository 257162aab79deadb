"""One op = one file: a torch reference, its Triton kernel and the entry that picks between them."""

# transformers probes for a package of this name and reads its version: it must find one older than it accepts.
__version__ = "0"
