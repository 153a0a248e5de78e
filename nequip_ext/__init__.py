"""NequIP adapter of e²IP."""
