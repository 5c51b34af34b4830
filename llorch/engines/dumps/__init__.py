"""Read what an engine computed, from files or from this process, as stages of the table.

Input: a folder, a .safetensors, .npz or .npy file, a capture of llama.cpp's eval callback, a torch module or a Python
function. Output: a `StageDump`, the stages in llorch's layout, for as many passes, layers and tokens as were written.
Nothing is judged here. The order to read:

    stage_dump     the result of every reader
    raw            arrays as files hold them, under the engine's names. `index` reads the folder that anyone can write,
                   `tensor_files` the formats of other tools
    recorder       stages that a Python engine shows while it runs; `engines.capture.capture` attaches it to a module
    stage_mapping  arrays to stages: `engine_names` has the names of llorch, llama.cpp and Hugging Face, `mapping` reads
                   a user's names, `ids` finds tokens, `reading` finds rows and the order of axes, and compares with
                   llorch's own run
    layout         heads joined or split, a batch axis, fused projections, transposed, permuted: declared or found
    suggest_mapping   a draft of such a mapping: `match_stages` finds the stage whose values an array has
    training_dump  optimizer steps: losses, gradients, moments, parameters
    writers/       the writer in Python, C, Rust and C++
"""
