"""Lessons: a learner writes the functions of one checkpoint, and llorch judges them as it judges its own.

An *exercise* is one function that a learner writes. It replaces llorch's function in the running forward pass, and the
verification judges the result by the goldens of both engines. The order to read:

    exercise, exercises/      an exercise, and all of them
    lessons                   the exercises of each checkpoint, and its files: stub, hints, mistakes, the learner's
    folder, program           a learner's files, or a program in any language
    guard, calling            checks around a learner's function; one call, and the learner's line that raised
    choice                    the implementation that a command means; llorch fills in what is not written
    judging, checks/          the result of a check, and the check of each kind of lesson
    verdict, check            the verdict of a lesson, and the way to it; `failed_comparison` shows a failure
    sandbox                   a check in a process of its own
    progress                  what is done so far, and the certificate
    on_torch/                 lesson 14: exercises on tensors; for it alone torch is imported
    typed_mistakes            functions with a mistake, made from the rows of `llorch.diagnosis.mistakes`
    fault_injection           each mistake in place of the learner's function: does the check name it
    museum/                   bugs of real people, as exercises
"""
