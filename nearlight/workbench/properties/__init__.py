"""The properties an op must have, one file each; a new one is a new file and a name here."""

from nearlight.workbench.properties import (
    extremes,
    layouts,
    lifecycle,
    poison,
    shapes,
    size,
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
        ),
        key=lambda prop: prop.number,
    )
)
