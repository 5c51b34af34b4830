"""LoRA on torch: adapters on modules of the torch model.

Input: an `Adapter` of `llorch.lora` and a model. Output: the model with wrapped modules, the parameters to train,
and the adapter again, as arrays. Reading order:

    adapters   attach, activate, train and detach adapters: the interface
    modules    a frozen module with adapters; the product of an adapter, with a backward pass that saves memory
    serving    many adapters on one running base, with a separate view per request
"""
