"""Used by the API process and the engine process alike: types, errors, parameters, IPC, settings, logs."""
