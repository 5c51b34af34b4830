"""Learning by writing: one lesson per checkpoint, a learner's own functions judged as ours are.

A *part* is one function that a learner writes; it takes the place of ours in the running forward pass, and the
verification then judges what comes out, beside the goldens of both engines. In the order to read:

    part, parts/              what a part is, and all of them
    lessons                   which belong to which checkpoint, and where files lie
    folder, program, npz      a learner's files, or a program in any language; what is not written is borrowed
    guard, implementation     the learner's functions behind checks, put in the place of ours
    inner_calls               the part inside another that returns a wrong dtype
    choice                    which implementation is meant
    judging, checks/          what a check gives, and how lessons of each kind are judged
    verdict, check            the four words, and the way from a lesson to one; `wrong` is what a failure shows
    apart, frames             a check in a process of its own; where in the learner's code something was raised
    progress, sources         what was done so far, and which files make a lesson; `certificate` writes it down
    on_torch/                 lesson 14: parts that are given tensors; nothing else here imports torch
    materials, teeth          stubs, hints and typed mistakes; whether mistakes would be seen in a solution
    museum/                   bugs that people had, as exercises
"""
