"""Drafts of tables for families that raffm does not know.

`probe` builds the model at several sizes without weights, `outline` finds its blocks and names its lengths, `recognise`
knows attention, feed-forward and convolutions when it sees them, and `write` puts it all into TOML.
"""

from raffm.models.draft.write import draft

__all__ = ["draft"]
