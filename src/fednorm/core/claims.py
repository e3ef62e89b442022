"""What a part may claim for itself; two parts with the same claim are refused, in these words.

Written once, because a claim with a typing mistake would let through what it should refuse. Policies of kinds are
claimed with `policy_claims`.
"""

NORM_LAYERS = "choice:the norm layers"
CONVOLUTIONS = "choice:the convolutions"
CLIPPING = "choice:gradient clipping"
LAST_INPUT = "choice:the last layer's input"
PROXIMAL_TERM = "loss:the proximal term"
MERGE_STATISTICS = "merge:statistics"
MERGE_TRAINED = "merge:weights and affine"
WEIGHTS = "weights"
SWITCH = "switch"
FINISH = "finish"
DATA = "data"
NEWCOMERS = "statistics of newcomers"
