"""Adapters to other libraries. Each imports its library only when it is imported itself."""
