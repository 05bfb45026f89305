"""The properties an op must have, one file each; a new one is a new file and a name here."""

from nearlight.workbench.properties import (
    determinism,
    extremes,
    layouts,
    lifecycle,
    machine_code,
    memory,
    poison,
    sanitizer,
    shapes,
    size,
    torch,
    values,
)

PROPERTIES = tuple(
    sorted(
        (
            values.PROPERTY,
            layouts.PROPERTY,
            shapes.PROPERTY,
            size.PROPERTY,
            lifecycle.PROPERTY,
            extremes.PROPERTY,
            poison.PROPERTY,
            torch.PROPERTY,
            sanitizer.PROPERTY,
            determinism.PROPERTY,
            memory.PROPERTY,
            machine_code.PROPERTY,
        ),
        key=lambda prop: prop.number,
    )
)
