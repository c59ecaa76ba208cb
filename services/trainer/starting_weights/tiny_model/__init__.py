"""The embedded policy: tokenizer, chat template, architecture and what it is first taught."""
