"""A sandbox without namespaces: a seccomp filter and a view of the files."""
