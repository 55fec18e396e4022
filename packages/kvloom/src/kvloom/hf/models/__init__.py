"""Attention modules that kvloom replaces during a step, one file a lineage of models."""

ADAPTED = {
    "big_bird": ("bert", "BigBirdSelfAttention"),
    "bloom": ("bloom", "BloomAttention"),
    "codegen": ("gptj", "CodeGenAttention"),
    "diffllama": ("diffllama", "DiffLlamaAttention"),
    "falcon": ("falcon", "FalconAttention"),
    "gpt_neo": ("gpt_neo", "GPTNeoSelfAttention"),
    "gpt_neox_japanese": ("gpt_neox_japanese", "GPTNeoXJapaneseAttention"),
    "gptj": ("gptj", "GPTJAttention"),
    "jetmoe": ("jetmoe", "JetMoeAttention"),
    "megatron-bert": ("bert", "MegatronBertSelfAttention"),
    "mpt": ("mpt", "MptAttention"),
    "mvp": ("bart", "MvpAttention"),
    "rembert": ("bert", "RemBertSelfAttention"),
    "roformer": ("bert", "RoFormerSelfAttention"),
    "trocr": ("bart", "TrOCRAttention"),
    "xglm": ("bart", "XGLMAttention"),
}
"""By model type: the file here with its `attend`, and the class of its attention modules."""
