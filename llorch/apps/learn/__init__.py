"""Lessons: a learner writes the functions of a checkpoint (validation point), and llorch judges them like its own.

An *exercise* is one function that a learner writes. It replaces llorch's function in the running forward pass, and the
verification compares the arrays (stages) with stored outputs of both reference engines (goldens). The order to read:

    exercise, exercises/      an exercise, and all of them
    lessons                   the exercises of each checkpoint, and the lesson's files: stub, hints, mistakes
    folder, program           a learner's Python files, or a program in any language
    guard, calling            checks around a learner's function; one call, and the learner's line that raised
    choice                    the implementation that a command means; llorch fills in unwritten exercises
    function_calls            recorded calls of a learner's functions
    small_cases               calls with a few numbers, which a learner can compute by hand
    judging, checks/          the interface of a check, and the check of each kind of lesson
    check, verdict            run the check of a lesson, and report its verdict; `failed_comparison` shows a failure
    sandbox                   run a check in a child process
    progress                  the state of each lesson, and the certificate
    on_torch/                 lesson 14: exercises on tensors; no other lesson imports torch
    wrong_functions           the wrong function that returns the learner's results in all calls
    typed_mistakes            functions with a known mistake, made from `llorch.diagnosis.mistakes`
    beginners/, alterations   mistakes of beginners, and right functions with altered arguments or results
    fault_injection           tests the checks: do they detect each known mistake in a solution
    museum/                   bugs that users reported, as exercises
"""
