"""Settings for all tests: one thread, since tiny tensors lose time with more and bits may depend on their number."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("fednorm", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("fednorm")
