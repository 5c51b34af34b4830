"""LoRA on torch: adapters beside the modules of the torch model.

In comes an `Adapter` of `llorch.lora` and a model; out come the model with wrapped modules, the parameters to train,
and the adapter again, as arrays. In the order to read:

    adapters   put on, switch, train, take off: what others call
    modules    a frozen module and the adapters beside it; their product, with a lean backward pass
    serving    many adapters on one base that runs, each request with a view of its own
"""
