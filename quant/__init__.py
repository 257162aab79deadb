"""NVFP4 and MXFP8: encoders, decoders, the checkpoint that the engine loads and the frozen modules that train on it."""
