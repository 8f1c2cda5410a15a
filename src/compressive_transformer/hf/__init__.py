"""The model for the library transformers (extra `hf`): its config, its cache, `generate`, export.

Importing this registers the model with AutoConfig and AutoModelForCausalLM. Nothing else of the package imports
transformers, which takes seconds.
"""

from importlib.util import find_spec

from ..errors import CompressiveError

if find_spec("transformers") is None:
    raise CompressiveError("this needs the library transformers: pip install 'compressive-transformer[hf]'")

from transformers import AutoConfig, AutoModelForCausalLM

from .cache import CompressiveTransformerCache
from .configuration import CompressiveTransformerConfig
from .export import export_transformers
from .modeling import CompressiveTransformerForCausalLM, CompressiveTransformerOutput

__all__ = [
    "CompressiveTransformerCache",
    "CompressiveTransformerConfig",
    "CompressiveTransformerForCausalLM",
    "CompressiveTransformerOutput",
    "export_transformers",
]

AutoConfig.register(CompressiveTransformerConfig.model_type, CompressiveTransformerConfig, exist_ok=True)
AutoModelForCausalLM.register(CompressiveTransformerConfig, CompressiveTransformerForCausalLM, exist_ok=True)
