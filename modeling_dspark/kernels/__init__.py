"""The originals of the C++ sources."""
