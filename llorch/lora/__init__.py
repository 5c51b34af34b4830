"""LoRA without torch: small trained matrices beside frozen weights.

In comes an adapter, from a PEFT directory or a LoRA GGUF file, or as settings of one that is to be trained, and the
weights of its base. Out come logits (`model` runs the weights that this room wraps), another file, or a merged model.
In the order to read:

    config           rank, scale, and which matrices of a model are meant
    adapter          the arrays, checked: what every file is read into and written from
    adapted_weights  an adapter beside its base, as `forward` and `backward` see it (products: `ops/lora`)
    initial          what training starts from
    peft_config      of a PEFT directory the configuration; `peft_format` its tensors, `gguf_format` a GGUF file
    base             digests that tell which base an adapter was made for
    files            all of that behind one path: read an adapter, and refuse one that is made for another base
    merge            the sum in float64, in memory; `merge_files` on disk, and what rounding took of it
    export           from one format into the other
    summary          what `llorch lora inspect` shows
"""
