"""For tests with real agent clients: their programs, their jobs, the table of docs/clients.md."""
