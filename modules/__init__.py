"""nn.Modules over jagged features: torchrec types in, torchrec types out."""

if __name__ != "jagged.modules":
    raise ImportError(
        f"this package was imported as {__name__!r}; import it as 'jagged.modules' (the folder `modules/` is that package's home)"
    )
