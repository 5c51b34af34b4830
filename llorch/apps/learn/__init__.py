"""Lessons: a learner writes the functions of one checkpoint, and llorch judges them as it judges its own.

An *exercise* is one function that a learner writes. It replaces llorch's function in the running forward pass, and the
verification judges the result by the goldens of both engines. The order to read:

    exercise, exercises/      an exercise, and all of them
    lessons                   the exercises of each checkpoint, and the place of their files
    folder, program, npz      a learner's files, or a program in any language; llorch fills in what is not written
    guard, implementation     the learner's functions behind checks, installed in llorch; `calling` is one call
    inner_calls               the inner exercise that returns a wrong dtype
    choice                    the implementation that a command means
    judging, checks/          the result of a check, and the check of each kind of lesson
    verdict, check            the four words, and the way from a lesson to one; `failed_comparison` shows a failure
    sandbox, frames           a check in a process of its own; the line of the learner's code that raised
    progress, sources         what is done so far, and the files of a lesson; `certificate` writes it down
    on_torch/                 lesson 14: exercises on tensors; nothing else here imports torch
    materials                 stubs, hints and typed mistakes; `fault_injection` plants the mistakes
    typed, typed_training     typed mistakes, made from the rows of `llorch.diagnosis.mistakes`
    museum/                   bugs of real people, as exercises
"""
