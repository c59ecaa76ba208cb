"""What `make docs` adds to the pages in docs/: pages made from source, and links to them.

`site` is the hook that MkDocs calls. Each other module writes one kind of page and reads nothing
but the source it describes, so a page cannot say something else than the code.
"""
