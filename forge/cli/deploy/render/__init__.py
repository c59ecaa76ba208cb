"""The rendered files of every host: their content, manifest and secrets."""
