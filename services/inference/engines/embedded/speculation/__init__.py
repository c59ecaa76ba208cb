"""Speculation: draft heads draft several tokens, one step verifies them.

A draft of a position is the token that the sampler draws from the head's logits with the noise of
that position; it is accepted if the sampler draws the same token from the policy's logits. So the
tokens of a request are those without drafts, for any heads.

`drafter` makes drafts, `mask_tape` keeps their grammar masks for verification, `depth` chooses how
many drafts pay. Verification is the decode step's.
"""
