"""Variables of a user's shell that no test may see: colours, width, language, time zone, options of llorch.

Tests set every variable that they depend on. Variables stay that decide what can be imported or run at all (PATH, HOME,
PYTHONPATH, pip's, certificates), and those by which `.ci` chooses kernels and threads.
"""

import time
from collections.abc import MutableMapping
from fnmatch import fnmatchcase

REMOVED = (
    "*_COLOR", "*_COLORS", "CLICOLOR*", "COLORTERM", "TERM", "TERM_*", "COLUMNS", "LINES", "TTY_*", "JUPYTER_*",
    "LC_*", "LANG", "LANGUAGE", "TZ", "*PAGER", "*EDITOR", "VISUAL", "BROWSER", "LESS", "INPUTRC",
    "BASH_ENV", "ENV", "CDPATH", "SOURCE_DATE_EPOCH", "MPL*", "XDG_*",
    "GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_*",
    "PYTHON*", "HF_*", "HUGGING*", "TRANSFORMERS_*", "TOKENIZERS_*", "OPENAI_*", "GGML_*", "LLAMA_*",
    "*_proxy", "*_PROXY", "LLORCH_*", "_LLORCH_*",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_*", "ROLE_*", "MASTER_*", "TORCHELASTIC_*",
    "TORCH_*", "OMP_DISPLAY_*",
)  # fmt: skip
KEPT = (
    "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX",
    "LLORCH_TESTS_CACHE", "LLORCH_VOCABULARIES", "LLORCH_LLAMACPP", "LLORCH_VERIFIED", "LLORCH_SCREENSHOTS",
)  # fmt: skip
SET = {
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "HF_HUB_OFFLINE": "1",  # huggingface_hub asks nobody but the server of a test
}


def clean_environment(environment: MutableMapping[str, str]) -> None:
    """Remove what tests may not see from the variables of a process, and set those of `SET`."""
    for name in list(environment):
        if name not in KEPT and any(fnmatchcase(name, pattern) for pattern in REMOVED):
            del environment[name]
    environment.update(SET)
    if hasattr(time, "tzset"):  # not on Windows
        time.tzset()
