"""The ops every fast path implements. Each family has a `ref`: torch, short and obvious."""
