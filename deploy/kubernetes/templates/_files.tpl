{{- /* A manifest of base/, gpu/ or examples/ as YAML, its resources named like the release. Arguments: root, path. */ -}}
{{- define "inkstream.file" -}}
{{- $name := include "inkstream.name" .root -}}
{{- regexReplaceAll "(?m)name: inkstream$" (.root.Files.Get .path) (printf "name: %s" $name) -}}
{{- end -}}

{{- /* inkstream, or RELEASE-inkstream where the release has another name. */ -}}
{{- define "inkstream.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
