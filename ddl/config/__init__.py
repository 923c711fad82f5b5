"""The config of a run: gin files, checked before anything is built and accounted for after.

The order of use: `load` → `build_bound`/`get_macro`/`set_macro` → `build` → `check_all_used` →
`config_text`/`operative_config_text`. Whatever is wrong is a `ConfigError` that says what,
where and what to do. There is one config in a process, since gin has one.
"""

from ddl.config.current import (
    build,
    build_bound,
    check_all_used,
    config_text,
    differences,
    get_macro,
    load,
    operative_config_text,
    set_macro,
)

__all__ = [
    "build",
    "build_bound",
    "check_all_used",
    "config_text",
    "differences",
    "get_macro",
    "load",
    "operative_config_text",
    "set_macro",
]
