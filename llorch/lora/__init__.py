"""LoRA without torch: small trained matrices that are added to frozen weights.

Input: the weights of a base, and an adapter from a PEFT directory, from a LoRA GGUF file, or as settings of a new one.
Output: logits (`model` runs the weights that this package wraps), another adapter file, or a merged model. Modules in
reading order:

    config           rank, scaling and target matrices of an adapter
    adapter          the validated arrays that every file format is read into and written from
    adapted_weights  base weights with an adapter, as `forward` and `backward` use them (products: `ops/lora`)
    initial          initial values for training
    peft_config      configuration of a PEFT directory; `peft_format`: its tensors; `gguf_format`: a LoRA GGUF file
    base             digests that identify the base of an adapter
    files            reads an adapter of either format, and refuses one of another base
    merge            merges in float64 in memory; `training.merge_files` merges files and measures the rounding error
    export           converts between the formats
    summary          contents of `llorch lora inspect`
"""
