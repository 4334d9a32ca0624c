"""Optional C++ kernels for the CPU: their sources, how they are built and cached, and how Python calls them."""
