"""The order in which rollouts are leased to runners, and the end of their attempts."""
