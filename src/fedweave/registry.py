"""Federated methods by name: the module and class of each. Nothing is imported until a run needs it."""

METHODS = {
    "fedweave": "fedweave.methods.fedweave:FedWeave",
    "fedit": "fedweave.methods.single:FedIT",
    "ffa-lora": "fedweave.methods.single:FFALoRA",
    "rolora": "fedweave.methods.single:RoLoRA",
    "fedsvd": "fedweave.methods.single:FedSVD",
    "fedsa-lora": "fedweave.methods.single:FedSALoRA",
    "fedlease": "fedweave.methods.several:FedLEASE",
    "ifca": "fedweave.methods.several:IFCA",
    "fedrouter": "fedweave.methods.several:FedRouter",
    "without-prototype-expert": "fedweave.methods.fedweave:WithoutPrototypeExpert",
    "without-client-router": "fedweave.methods.fedweave:WithoutClientRouter",
    "oracle": "fedweave.methods.oracle:Oracle",
    "centralised": "fedweave.methods.single:Centralised",
    "local-only": "fedweave.methods.single:LocalOnly",
}

# Methods whose updates are only ever added up.
SUMMED = ("fedweave", "without-prototype-expert", "fedit", "ffa-lora", "rolora", "fedsvd")

# Methods with a guarantee of differential privacy: the questions before round 1 whose answers hold noise.
PRIVATE: dict[str, tuple[str, ...]] = {
    "fedweave": ("discover", "start", "warm"),
    "without-prototype-expert": ("discover", "start", "warm"),
    "fedlease": ("discover", "start"),
    **dict.fromkeys(("fedit", "ffa-lora", "rolora", "fedsvd", "fedsa-lora"), ()),
}
