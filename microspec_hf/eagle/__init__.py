"""The EAGLE-1/2 head: its configuration, its network, and the checkpoint layouts that people have."""

from microspec_hf.eagle.checkpoint import check_pair, load_drafter
from microspec_hf.eagle.config import EagleConfig
from microspec_hf.eagle.model import EagleHead

__all__ = ["EagleConfig", "EagleHead", "check_pair", "load_drafter"]
