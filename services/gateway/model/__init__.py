"""The served model without its weights: tokenizer, chat template, output formats.

Imports no other room of the gateway, and no torch.
"""
