"""A virtual machine with Debian's kernel, for tests that need control groups of version 2.

`kernel` has the kernel and its first file system; `machine` boots it and runs pytest inside.
`python -m tests.support.vm <arguments of pytest>` is `make test-vm`.
"""
