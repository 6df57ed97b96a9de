"""The custom resources: pydantic models, the rules on them, and the CRDs that are generated from both."""
