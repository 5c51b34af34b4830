"""Read the arrays that an engine computed, from files or from this process, as stages (rows of `stages.table`).

Input: a folder, a .safetensors, .npz or .npy file, a capture of llama.cpp's eval callback, a torch module or a Python
function. Output: a `StageDump`, the stages in llorch's layout, of the dumped passes (calls of the forward), layers and
tokens. `llorch.diagnosis` compares them. Read the modules in this order:

    stage_dump     the result of every reader
    raw            arrays in files, by the engine's names. `index` reads llorch's dump format, which every language can
                   write; `tensor_files` reads the formats of other tools
    recorder       stages that a Python engine records while it runs; `engines.capture.capture` attaches it to a module
    stage_mapping  arrays to stages: `engine_names` has the names of llorch, llama.cpp and Hugging Face, `mapping` reads
                   a user's names, `ids` finds tokens, `reading` finds rows and the order of axes, and compares with
                   llorch's run
    layout         joined heads, batch axis, fused projections, transposed, permuted: declared or detected
    widths         a rank's share of the heads, repeated KV heads, padded logits
    suggest_mapping   drafts a mapping: `match_stages` finds the stage whose values an array has
    training_dump  optimizer steps: losses, gradients, moments, parameters
    writers/       the writer in Python, C, Rust and C++
"""
