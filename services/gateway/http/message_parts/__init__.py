"""Conversions of messages that several protocols share: arrays, images, tool results, prefill."""
