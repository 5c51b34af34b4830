"""Dumps: what a run of anybody's engine showed, read from files or taken in this process.

In comes a folder, a .safetensors, .npz or .npy file, a capture of llama.cpp's eval callback, a torch module or a Python
function; out comes a `StageDump`: stages of our table in our layout, for as many passes, layers and tokens as were
written. Nothing is judged here. In the order to read:

    stage_dump   what all of it ends in
    raw          arrays as they lie in files, under the names of the engine. `index` reads the folder that anyone can
                 write, `tensor_files` the formats of others; `stored` is one array in a file
    recorder     what an engine in Python shows while it runs; `pytorch.capture.capture` hooks a torch module up to it
    names        arrays to stages: `known_names` are ours, llama.cpp's and those of Hugging Face, `mapping` reads those
                 of a user, `ids` finds tokens, `reading` their rows and the order of axes, `our_run` what is like ours
    layout       heads joined or split, a batch axis, fused projections, transposed, permuted: as declared, or as found
    suggest      a draft of such a mapping: `alike` finds whose values are like which stage of our run
    training_dump   optimizer steps instead of stages: losses, gradients, moments, parameters; tokens: `training_rows`
    writers/     the writer in Python, C, Rust and C++
"""
