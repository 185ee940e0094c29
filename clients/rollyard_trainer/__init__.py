"""A reference GRPO-RoC trainer (rStar2-Agent, arXiv 2508.20722), to be read in an evening.

Read in this order: ``roc`` (the paper's contribution, numpy only), ``objective`` (equation 6),
``loop`` (one training step), ``env`` (tool calls through a Rollyard service), ``toy`` (the claim
put to the test on a laptop). Only ``objective``, ``loop`` and ``engines.tiny`` need torch.
"""
