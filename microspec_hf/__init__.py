"""Lossless speculative decoding with draft-vocabulary pruning for Hugging Face transformers.

Importing the package registers the strategy `"microspec"`:

    import microspec_hf
    model.generate(**inputs, custom_generate="microspec", drafter="yuhuili/EAGLE-LLaMA3-Instruct-8B")
"""

from microspec_hf.candidate_generator import MicroSpecCandidateGenerator
from microspec_hf.config import MicroSpecConfig, TreeConfig, VocabularyConfig
from microspec_hf.eagle import EagleConfig, EagleHead, load_drafter
from microspec_hf.generation import MicroSpecOutput, generate, register, run, unregister
from microspec_hf.sessions import release
from microspec_hf.stats import SpeculationStats
from microspec_hf.tree import DraftTree, Verification

__version__ = "0.1.0"

__all__ = [
    "DraftTree",
    "EagleConfig",
    "EagleHead",
    "MicroSpecCandidateGenerator",
    "MicroSpecConfig",
    "MicroSpecOutput",
    "SpeculationStats",
    "TreeConfig",
    "Verification",
    "VocabularyConfig",
    "generate",
    "load_drafter",
    "register",
    "release",
    "run",
    "unregister",
]

register()
